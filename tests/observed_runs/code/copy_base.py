import shutil

from tiny import BASE

shutil.copytree(BASE, "output/v1")
