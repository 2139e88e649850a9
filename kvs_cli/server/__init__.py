"""``kvs serve``: llama-server's API over one engine. All HTTP and JSON of kvs is here; the engine runs in one thread.

    request ─ front (CORS, key, loading) ─ routes ─ schemas: checked ─ JobQueue ─ engine thread: Generation
    reply   <─ a format's frames or object <─ events <────────────────────────────────┘
"""
