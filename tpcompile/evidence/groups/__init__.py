"""One value per rank or group of ranks -> who agrees with whom, and which compiles correspond."""
