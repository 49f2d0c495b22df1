"""The API server: the endpoint plugin, requests, routes, metrics; launching one server or a pair."""
