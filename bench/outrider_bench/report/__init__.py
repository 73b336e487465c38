"""Figures from runs (`summary`, `spread`), and a page with tables and plots."""
