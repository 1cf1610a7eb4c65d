"""Web servers on loopback over one folder: aiohttp's, which knows ranges, versions and logins, the same over TLS and on another port, and
Python's own, which knows none of them.

Prints addresses and folder as its first line. Then a line of JSON on standard input is one order, and a line of JSON the answer.
"""

import asyncio
import base64
import functools
import hashlib
import http.server
import json
import os
import ssl
import sys
import tempfile
import threading

import trustme
from aiohttp import web

PAGE = "<html><body>Sign in</body></html>"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Files:
    """What is below the folder, to whoever may have it."""

    def __init__(self, folder):
        self.folder, self.login, self.moved, self.heard = folder, None, None, []

    async def get(self, request):
        name = request.match_info["name"]
        self.heard.append([request.headers.get("Authorization"), request.headers.get("If-Match")])
        if self.login and request.headers.get("Authorization") != self.login:
            status = 403 if request.headers.get("Authorization") else 401
            return web.Response(status=status, text="not for you")
        if name.startswith("moved/"):
            raise web.HTTPFound(self.moved + name.removeprefix("moved/"))
        if name.startswith("login/"):
            return web.Response(text=PAGE, content_type="text/html")
        path = os.path.join(self.folder, name)
        if not os.path.isfile(path):
            raise web.HTTPNotFound()
        if name.startswith("mute/"):
            with open(path, "rb") as file:
                return web.Response(body=file.read())
        answer = web.FileResponse(path)
        if name.startswith("summed/"):
            with open(path, "rb") as file:
                hash = base64.b64encode(hashlib.sha256(file.read()).digest()).decode()
            answer.headers["Repr-Digest"] = "sha-256=:%s:" % hash
        return answer

    async def start(self, tls=None):
        app = web.Application()
        app.router.add_get("/{name:.*}", self.get)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        return "127.0.0.1:%d" % runner.addresses[0][1]


def main():
    folder = tempfile.mkdtemp()
    ca = trustme.CA()
    ca_file = os.path.join(tempfile.mkdtemp(), "ca.pem")
    ca.cert_pem.write_to_path(ca_file)
    files, elsewhere = Files(folder), Files(folder)
    loop = asyncio.new_event_loop()

    async def start():
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        ca.issue_cert("127.0.0.1").configure_cert(tls)
        files.moved = "http://%s/" % await elsewhere.start()
        return await files.start(), await files.start(tls)

    address, secure = loop.run_until_complete(start())
    threading.Thread(target=loop.run_forever, daemon=True).start()
    plain = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=plain.serve_forever, daemon=True).start()
    said = {"address": address, "secure": secure, "ca": ca_file, "plain": "127.0.0.1:%d" % plain.server_port, "folder": folder}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = None
        match order["do"]:
            case "guard":
                files.login = order["login"]
            case "heard":
                answer, elsewhere.heard = elsewhere.heard, []
        print(json.dumps(answer), flush=True)
    # Whoever gave orders is gone, and the servers' threads would stay.
    os._exit(0)


main()
