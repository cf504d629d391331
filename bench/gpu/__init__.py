"""The parts of `bench.gpu_report`: one file each, one function that measures and returns a dict for the JSON."""
