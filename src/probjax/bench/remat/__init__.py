"""The suite `remat`: a train step of each model, plain, with its blocks computed again, with donation."""
