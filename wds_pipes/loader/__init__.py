"""PipeLoader: everything that knows of processes."""
