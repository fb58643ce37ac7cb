"""GPUDirect Storage: files to and from CUDA tensors through NVIDIA's cuFile."""
