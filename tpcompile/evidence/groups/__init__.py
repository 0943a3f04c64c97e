"""One value per rank or group of ranks -> which ranks agree, and which compiles correspond."""
