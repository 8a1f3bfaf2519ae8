"""The artifact folder: manifest, plans, kernels, weights and their checksums."""
