"""Inference engines behind one protocol: what they share (health, circuit breakers, replicas, load policy), and one
package for each engine.
"""
