"""The child process that opens a device and measures batches. Its modules run there; from outside import `inputs`, `timing` for
programs that run in this process, and `sandbox` and `start` for what `relax-tune doctor` shows.
"""
