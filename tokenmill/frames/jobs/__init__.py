"""The jobs of tables in this process: their requests, folders, results and estimates."""
