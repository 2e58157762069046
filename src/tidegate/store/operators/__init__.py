"""Verbs of operators: the jobs of all tenants, operations over many jobs, and the audit."""
