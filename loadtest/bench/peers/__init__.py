"""Side by side with others: one model and pictures behind FastAPI, LitServe, Ray Serve, BentoML, MLServer, us."""
