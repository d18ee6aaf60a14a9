"""The HTTP front end: aiohttp, OpenAI's routes. No torch here."""
