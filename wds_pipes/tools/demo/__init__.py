"""``wds-pipes demo``: compares a training that is killed and resumed with an uninterrupted one.

``trial``: starts the trainings and kills one. ``data``: its images; ``train``:
the program that it starts.
"""
