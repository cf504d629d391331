"""Which layout for which load, and the least movement towards it: mixed-integer programs for cvxpy on HiGHS.

Runs in a process of its own (`process.py`), in `dlmserve plan` and in the simulator; the head never imports it.
"""
