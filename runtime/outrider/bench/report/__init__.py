"""From runs to figures (`summary`, `spread`), and from figures to a page with tables and plots."""
