"""Videos over HTTP: sessions that a person drives, jobs in OpenAI's shape, and the page to play."""
