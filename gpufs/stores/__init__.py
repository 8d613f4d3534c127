"""Files of object stores, web servers and the Hugging Face Hub: finding, reading and writing them.

It knows nothing of mounts: gpufs.copying writes what it reads to files. obstore and huggingface_hub, which are
optional, are imported when the first URL needs them.
"""
