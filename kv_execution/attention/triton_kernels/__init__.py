"""Our Triton kernels: append, ragged attend, split-KV decode and merge, over NHD pools.

For:        NVIDIA and AMD GPUs; importing a module here imports triton.
Not for:    launching (triton_bridge.py), tile sizes (triton_tiles.py) or who does what (triton_work.py).
May import: triton.
"""
