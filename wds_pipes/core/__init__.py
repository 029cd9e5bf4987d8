"""What a chain of stages is and where it stands: pure Python, without torch, files or threads."""
