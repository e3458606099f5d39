"""Several engines on one machine, fed from one input: a process for each group of devices.

For:        ``generate --replicas``: devices.py shares out the machine, group.py keeps processes, worker.py hands out
            rows by deal.py, child.py runs them, wire.py is what goes between, figures.py adds up what they report, and
            model.py is the whole as a model.
Not for:    several machines (maxtext_paged.ray), or one engine over several devices (a mesh).
May import: see each module.
"""
