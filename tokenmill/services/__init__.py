"""The long-running commands: gateway, intake, dispatcher, worker, autoscaler."""
