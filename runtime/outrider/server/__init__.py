"""An HTTP server with OpenAI's API: `outrider serve`.

    from outrider.server import Settings, make_app

    app = make_app({"qwen": "qwen-coder-pair"}, Settings(api_key="…"))     # an ASGI app, for uvicorn and others

Needs the extra: pip install "outrider[server]".
"""

from outrider.server.app import make_app
from outrider.server.settings import Settings

__all__ = ["Settings", "make_app"]
