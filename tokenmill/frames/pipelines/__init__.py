"""Pipelines over tables: several columns, made from columns of the table and of each other."""
