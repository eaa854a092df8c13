import base64
import sys

exec(base64.b64decode(sys.stdin.read()))
