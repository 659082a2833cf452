"""Typed frozen sections; YAML with overlays and overrides; checks that only reject; one `resolve` that derives."""
