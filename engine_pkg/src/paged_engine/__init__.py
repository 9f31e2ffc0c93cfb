"""A paged-KV engine for Hugging Face checkpoints, made to run inside Triton's Python backend.

Layers, each using only those below it: serving (threads, Triton) > engine (one step) > scheduling, text, execution >
attention, models > kernels. `config` and `request` are what operators and users may say.
"""
