"""A bucket on loopback: moto's S3 server, and the official client that fills and reads it.

Prints the address as its first line. Then a line of JSON on standard input is one order, and a line of JSON the answer.
"""

import json
import os
import sys
import urllib.request

import boto3
from boto3.s3.transfer import TransferConfig
from moto.server import ThreadedMotoServer

BUCKET = "models"
READS = ["s3:ListBucket", "s3:GetObject"]


def main():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "%s:%d" % server.get_host_and_port()
    orders = Orders(f"http://{address}")
    print(json.dumps({"address": address}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(orders, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)
    # Whoever gave orders is gone, and the server's threads would stay.
    os._exit(0)


def policy(actions, **more):
    return json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": actions, **more}]})


class Orders:
    def __init__(self, endpoint):
        self.endpoint = endpoint
        first = {"aws_access_key_id": "first", "aws_secret_access_key": "first"}
        self.iam = self.client("iam", first)
        admin = self.user("admin", ["*"])
        self.iam, self.s3, self.sts = (self.client(service, admin) for service in ["iam", "s3", "sts"])
        self.s3.create_bucket(Bucket=BUCKET)

    def client(self, service, keys):
        return boto3.client(service, endpoint_url=self.endpoint, region_name="us-east-1", **keys)

    def put(self, key, path, checksum=None, part_bytes=1 << 40, public=False):
        more = {"ChecksumAlgorithm": checksum} if checksum else {}
        if public:
            more["ACL"] = "public-read"
        parts = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes)
        self.s3.upload_file(path, BUCKET, key, ExtraArgs=more, Config=parts)

    def delete(self, key):
        self.s3.delete_object(Bucket=BUCKET, Key=key)

    def get(self, key, path):
        self.s3.download_file(BUCKET, key, path)

    def user(self, name, actions):
        self.iam.create_user(UserName=name)
        if actions:
            self.iam.put_user_policy(UserName=name, PolicyName="allowed", PolicyDocument=policy(actions, Resource="*"))
        key = self.iam.create_access_key(UserName=name)["AccessKey"]
        return {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}

    def reader(self):
        return self.user("reader", READS)

    def role(self):
        """Keys of a role that reads, for an hour."""
        who = policy(["sts:AssumeRole"], Principal="*")
        role = self.iam.create_role(RoleName="reads", AssumeRolePolicyDocument=who)["Role"]
        self.iam.put_role_policy(RoleName="reads", PolicyName="allowed", PolicyDocument=policy(READS, Resource="*"))
        keys = self.sts.assume_role(RoleArn=role["Arn"], RoleSessionName="tests")["Credentials"]
        names = {"aws_access_key_id": "AccessKeyId", "aws_secret_access_key": "SecretAccessKey", "aws_session_token": "SessionToken"}
        return {name: keys[of] for name, of in names.items()}

    def enforce(self):
        """From now on every request must be signed by who may."""
        headers = {"Content-Type": "text/plain"}
        ask = urllib.request.Request(f"{self.endpoint}/moto-api/reset-auth", data=b"0", method="POST", headers=headers)
        urllib.request.urlopen(ask).read()


main()
