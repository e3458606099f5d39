"""What people look at: one recorder that a job feeds, and the views of it.

For:        counts, distributions and courses over time in bounded memory; the metrics file; the report page.
Not for:    running anything, or reading and writing rows.
May import: the standard library, numpy, jinja2, prometheus_client; maxtext_paged without MaxText. No jax.
"""
