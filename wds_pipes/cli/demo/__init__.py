"""``wds-pipes demo``: compares a training that is killed and resumed with an uninterrupted one.

``command``: the command. ``data``: its images; ``plan``: what is trained; ``runs``: starts the
trainings, and kills one; ``train``: the program that they run; ``picture``: their losses.
"""
