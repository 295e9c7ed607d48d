"""The parent process of `penstock up`: checks the settings, then starts and supervises the engine and the gateway."""
