python3 -c 'import urllib.request' || { echo "this Python is not whole"; exit 1; }
