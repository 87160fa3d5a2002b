"""Five published ways to hand a conversation over, each one command and one config file: the
protocol of a study, run on the tiny family or on models of your own.
"""
