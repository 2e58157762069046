"""The description of all routes: an OpenAPI document, a page that shows it, and the first page of a
server.
"""
