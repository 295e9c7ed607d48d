"""Analytics of tracks as in DeepStream's nvdsanalytics: rules, their evaluation and their configuration. No I/O and
no clock.
"""
