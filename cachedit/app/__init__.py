"""The app: a page in the browser where caches are tried, models calibrated and reports built. Needs Gradio."""
