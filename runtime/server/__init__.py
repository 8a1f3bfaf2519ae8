"""`aotc serve`: OpenAI's API over HTTP in this process, the engine in a child."""
