"""What pushes to a registry and pulls from it, ORAS' client for Python, and a server that hands out tokens for one.

Prints a line when it is ready. Then a line of JSON on standard input is one order, and a line of JSON the answer.
"""

import base64
import http.server
import json
import os
import sys
import threading
import time
import urllib.parse

import oras.client
import oras.oci
from joserfc import jwt
from joserfc.jwk import ECKey


def main():
    print(json.dumps({}), flush=True)
    orders = Orders()
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(orders, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)
    # Whoever gave orders is gone, and the server's threads would stay.
    os._exit(0)


class Orders:
    def push(self, target, directory, names):
        """Files and folders of a directory, each a layer, as `oras push` makes them."""
        os.chdir(directory)
        client = oras.client.OrasClient(insecure=True)
        client.push(target=target, files=names, disable_path_validation=True, quiet=True)

    def push_layers(self, target, layers):
        """Layers as they are said: path, media type, annotations."""
        client = oras.client.OrasClient(insecure=True)
        container, manifest = client.get_container(target), oras.oci.NewManifest()
        for said in layers:
            layer = oras.oci.NewLayer(said["path"], media_type=said["media_type"])
            layer["annotations"] = said["annotations"]
            client.upload_blob(said["path"], container, layer).raise_for_status()
            manifest["layers"].append(layer)
        empty = layers[0]["path"] + ".config"
        with open(empty, "w") as file:
            file.write("{}")
        config, _ = oras.oci.ManifestConfig(empty, "application/vnd.oci.image.config.v1+json")
        client.upload_blob(empty, container, config).raise_for_status()
        manifest["config"] = config
        client.upload_manifest(manifest, container).raise_for_status()

    def pull(self, target, directory):
        oras.client.OrasClient(insecure=True).pull(target=target, outdir=directory)

    def tokens(self, user, password, service):
        """Starts to hand out tokens; where, and the keys that they are signed with."""
        key = ECKey.generate_key("P-256", {"kid": "tests", "use": "sig", "alg": "ES256"})
        basic = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
                right = query.get("service") == [service]
                kind, name, actions = query["scope"][0].split(":")
                may = right and (self.headers.get("Authorization") == basic or name.startswith("public/"))
                if self.headers.get("Authorization") and not may:
                    return self.answer(401, {"errors": [{"code": "UNAUTHORIZED", "message": "wrong user or password"}]})
                access = [{"type": kind, "name": name, "actions": actions.split(",")}] if may else []
                now = int(time.time())
                claims = {"iss": "tests", "sub": user, "aud": service, "iat": now, "nbf": now - 5, "exp": now + 300, "access": access}
                self.answer(200, {"token": jwt.encode({"alg": "ES256", "kid": "tests"}, claims, key)})

            def answer(self, status, body):
                body = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        public = key.as_dict(private=False)
        return {"realm": f"http://127.0.0.1:{server.server_port}/token", "keys": {"keys": [public]}}


main()
