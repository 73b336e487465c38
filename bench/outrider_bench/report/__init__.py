"""Figures from runs (`summary`), and a page with tables and bars (`page`)."""
