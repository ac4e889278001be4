"""Jobs and requests from Celery tasks."""
