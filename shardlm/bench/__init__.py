"""What is measured where a GPU is at hand: `python -m launch.bench gpu`."""
