"""Weight sync: the trained weights, placed where the sampler runs, verified there, published as a version."""
