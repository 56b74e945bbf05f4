"""Container images of the pipeline: what goes in, how they are built, and what is recorded of them."""
