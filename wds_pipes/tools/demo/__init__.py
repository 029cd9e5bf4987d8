"""``wds-pipes demo``: compares a training that is killed and resumed with an uninterrupted one.

``trial``: makes images, starts the trainings and kills one. ``train``: the program that it starts.
"""
