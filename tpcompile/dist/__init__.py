"""What ranks share: environment, mesh, store, collectives."""
