"""``wds-pipes demo``: compares a training that is killed and resumed with an uninterrupted one."""
