"""What the suites of whole networks share: options, programs with their times and memory, the run."""
