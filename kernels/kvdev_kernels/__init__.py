"""Page kernels: pack and unpack KV pages between paged tensors and staging pages."""
