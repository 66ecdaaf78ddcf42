"""The suite `recurrence`: the bare recurrences against their peers."""
