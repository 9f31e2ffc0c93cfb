"""What `build.sh` and the tests need around the engine: a Triton server to run it in, and a model to run."""
