"""The suites `transformer` and `diffusion`: forward and train step, by what stands in for attention."""
