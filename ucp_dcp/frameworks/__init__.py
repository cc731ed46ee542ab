"""Live trainers: what a running job holds -> a state dict with global names, and back into the job."""
